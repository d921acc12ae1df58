"""Characters to ids: corpora, vocabularies, encoded datasets and the streams that training reads."""
