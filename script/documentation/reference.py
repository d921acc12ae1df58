"""The pages of the command line, from the help of every verb, and of the keys of recipes, from their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from documentation.api import toctree

from reefknot.lab.cli.main import VERBS, VerbGroup, iter_verbs, load_verb
from reefknot.lab.config.parts import FAMILIES
from reefknot.lab.tasks import TASKS, load_task

HELP_WIDTH = 88
SUMMARY_LENGTH = 1000


def write_verb_pages() -> Iterator[tuple[str, str]]:
    """Yield one page per verb, and the list of verbs."""
    rows, pages = [], []
    for words, command in iter_verbs():
        verb, page = " ".join(words), "-".join(words)
        context = command.make_context(f"reefknot {verb}", [], resilient_parsing=True, max_content_width=HELP_WIDTH)
        context.terminal_width = HELP_WIDTH
        yield f"reference/verbs/{page}", f"# `reefknot {verb}`\n\n```text\n{command.get_help(context).strip()}\n```\n"
        rows.append(f"| [`{verb}`]({page}.md) | {command.get_short_help_str(SUMMARY_LENGTH)} |")
        pages.append(page)
    groups = [f"`{name}`" for name in VERBS if isinstance(load_verb(name), VerbGroup)]
    yield (
        "reference/verbs/index",
        (
            "# Command line\n\nEvery verb with its options, as `reefknot VERB --help` prints them. "
            f"{' and '.join(groups)} are groups of verbs. [Commands](../../commands.md) has more examples.\n\n"
            "| verb | what it does |\n|---|---|\n" + "\n".join(rows) + "\n\n" + toctree(pages)
        ),
    )


def write_recipe_pages() -> Iterator[tuple[str, str]]:
    """Yield one page per task and per family of parts, and the list of these pages."""
    pages = []
    for task in TASKS:
        experiment = load_task(task).Settings
        schema = experiment.model_json_schema()
        title = task.replace("_", " ").capitalize()
        text = f"# {title}\n\nSections of a recipe of the task `{task}`, and their keys.\n\n"
        for section in experiment.model_fields:
            text += describe_section(section, resolve(schema["properties"][section], schema), schema)
        yield f"reference/recipes/{task}", text
        pages.append((task, f"{title}: sections and keys"))
    for registry in FAMILIES:
        text = f"# {registry.family.capitalize()}\n\nA recipe names one of these parts by its `kind`.\n\n"
        for kind in registry:
            schema = registry.settings_class(kind).model_json_schema()
            text += f"## `{kind}`\n\n{registry.summary(kind)}\n\n{describe_keys(schema, schema)}\n"
        yield f"reference/recipes/{registry.family}", text
        kinds = ", ".join(f"`{kind}`" for kind in registry)
        pages.append((registry.family, f"{registry.family.capitalize()}: {kinds}"))
    introduction = (
        "Every key of a recipe, with its type, bounds and default. [Runs](../../runs.md#recipes) has an example."
    )
    listed = "\n".join(f"- [{title}]({page}.md)" for page, title in pages)
    contents = toctree([page for page, _ in pages])
    yield "reference/recipes/index", f"# Recipe keys\n\n{introduction}\n\n{listed}\n\n{contents}"


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its reference followed."""
    if "$ref" in schema:
        return {**root["$defs"][schema["$ref"].rpartition("/")[2]], **{k: v for k, v in schema.items() if k != "$ref"}}
    return schema


def describe_section(name: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return one section of a recipe: its description and its keys."""
    text = f"## `[{name}]`\n\n{escape(schema.get('description', ''))}\n\n"
    if schema.get("properties"):
        text += describe_keys(schema, root, f"{name}.")
    return text + "\n"


def describe_keys(schema: dict[str, Any], root: dict[str, Any], prefix: str = "") -> str:
    """Return the table of the keys of a section or a part. Keys of nested tables have their path as a name."""
    rows = list(iter_rows(schema, root, prefix))
    if not rows:
        return "It has no settings.\n"
    lines = ["```{table}", ":class: keys", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, "```"]
    return "\n".join(lines) + "\n"


def iter_rows(schema: dict[str, Any], root: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the rows of a table of keys."""
    required = schema.get("required", ())
    for key, raw in schema.get("properties", {}).items():
        if key == "kind":
            continue
        value = resolve(raw, root)
        default = "required" if key in required else format_value(value.get("default"))
        meaning = escape(value.get("description", ""))
        yield f"| `{prefix}{key}` | {format_type(value, root)} | {default} | {meaning} |"
        for option in [resolve(option, root) for option in value.get("anyOf", [value])]:
            if option.get("properties") and "kind" not in option["properties"]:
                yield from iter_rows(option, root, f"{prefix}{key}.")


def format_type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return the type of a key in words, with its bounds or its choices."""
    schema = resolve(schema, root)
    if "anyOf" in schema:
        options = [format_type(option, root) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "enum" in schema:
        return ", ".join(format_value(value) for value in schema["enum"])
    if "const" in schema:
        return format_value(schema["const"])
    if "oneOf" in schema or "kind" in schema.get("properties", {}):
        return "part"
    names = {"object": "table", "array": "list", "string": "text", "boolean": "true or false"}
    name = names.get(schema.get("type", ""), schema.get("type", "any"))
    if schema.get("type") == "array" and "items" in schema:
        name = f"list of {format_type(schema['items'], root)}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if isinstance(schema.get(key), int | float) and abs(schema[key]) < 1e9
    ]
    return " ".join([name, ", ".join(bounds)]).strip()


def format_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def escape(text: str) -> str:
    """Return a description as the text of a table cell. Angle brackets are not HTML."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
