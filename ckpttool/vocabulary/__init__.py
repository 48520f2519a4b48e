"""Vocabularies of models that are merged: reading them, giving them common token ids, writing the tokenizer.

    read_vocabulary(directory)  -> Vocabulary         tokens and ids, from whatever tokenizer files there are
    merge_vocabularies(models)  -> MergedVocabulary   ids of the output, and which rows each model's matrices give
    tokenizer_files(merged)     -> {name: bytes}      the files that lie beside the merged model

The rules (which rows, which ids) are those of mergekit's ``tokenizer:``; the formats are Hugging Face's. No tokenizer
is run, so none of its libraries is needed.
"""

from ckpttool.vocabulary.chat import chat_template
from ckpttool.vocabulary.merge import Input, MergedVocabulary, Row, TokenRule, merge_vocabularies
from ckpttool.vocabulary.read import TOKENIZER_FILES, Added, Vocabulary, read_vocabulary
from ckpttool.vocabulary.write import tokenizer_files

__all__ = [
    "TOKENIZER_FILES",
    "Added",
    "Input",
    "MergedVocabulary",
    "Row",
    "TokenRule",
    "Vocabulary",
    "chat_template",
    "merge_vocabularies",
    "read_vocabulary",
    "tokenizer_files",
]
