"""The Penn Treebank in Mikolov's preprocessing: 10,000 words in lower case, numbers as N, other words as `<unk>`."""

from __future__ import annotations

from reefknot.lab.text.published import PublishedCorpus

PTB = PublishedCorpus(
    name="ptb",
    description="Penn Treebank in Mikolov's preprocessing",
    how_to_get="The files are in the folder data of Mikolov's simple-examples.tgz.",
    files={"train": "ptb.train.txt", "valid": "ptb.valid.txt", "test": "ptb.test.txt"},
    tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
    types=10_000,
    sha256={
        "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
    },
)
