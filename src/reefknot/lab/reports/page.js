// Makes the tables of the report sortable. The page is complete without this script.
"use strict";

const UNITS = { MB: 1e6, GB: 1e9 };

// The number that a cell starts with, such as 114.5 in "114.5 ± 0.7", or null.
function parseNumber(text) {
  const plain = text.replaceAll(",", "").replaceAll("−", "-").replace(/^so far /, "");
  const match = plain.match(/^([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?: (MB|GB)\b)?/);
  return match && Number(match[1]) * (UNITS[match[2]] || 1);
}

// Numbers come before texts. Empty cells come last in both directions.
function compareCells(first, second, direction) {
  if (!first || !second) return (first ? 0 : 1) - (second ? 0 : 1);
  const numbers = [parseNumber(first), parseNumber(second)];
  if (numbers[0] !== null && numbers[1] !== null) return direction * (numbers[0] - numbers[1]);
  if (numbers[0] !== null || numbers[1] !== null) return numbers[0] !== null ? -1 : 1;
  return direction * first.localeCompare(second, undefined, { numeric: true });
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[0];
  const originalRows = [...body.rows];
  if (originalRows.length < 2) return;

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column; a third click restores the order";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[heading.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      const rows = [...originalRows];
      if (order) {
        heading.setAttribute("aria-sort", order);
        const cellText = (row) => (row.cells[column] ? row.cells[column].textContent.trim() : "");
        const direction = order === "ascending" ? 1 : -1;
        rows.sort((first, second) => compareCells(cellText(first), cellText(second), direction));
      }
      body.append(...rows);
    });
  });
}

document.querySelectorAll("table.sortable").forEach(makeSortable);
