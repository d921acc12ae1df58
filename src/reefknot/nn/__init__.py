"""PyTorch modules for language models: word tables, input ends, encoders, classifiers, output ends, whole models.

    tables.py       word tables: the embeddings, which input and output can share
    inputs/         input ends: word ids to vectors
    encoders/       encoders: vectors to hidden states (LSTMs, transformers, ...)
    classifiers/    classifiers: one vector per class, and the scores of all classes
    outputs/        output ends: a softmax over the scores of a classifier, and its loss
    models/         whole models: `LanguageModel`, `Translator`, `SkipGram`

Every folder has a `contract.py` with the interface of its modules, except `models/`.
"""
