/* How search results are ranked. Sphinx alone ranks a page by its best word, so a page that has one word of the query in a
   heading equals a page that has all of them in its title. Here, every word of the query that is in the title or in a heading
   of the page adds to its score. The other numbers are Sphinx's defaults. */
var Scorer = {
  score: ([docName, , , , score, , kind]) => {
    if (kind !== "text") return score;
    const index = Search._index;
    const page = index.docnames.indexOf(docName);
    const stemmer = new Stemmer();
    const stem = (text) =>
      splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));
    const title = stem(index.titles[page]);
    const query = new Set(stem(new URLSearchParams(window.location.search).get("q")));
    for (const word of query) {
      if (title.includes(word)) score += 15;
      else if ([index.titleterms[word] ?? []].flat().includes(page)) score += 5;
    }
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
