"""From text files to batches of ids: corpora, vocabularies, encoded datasets, and the windows that training reads."""
