"""Vocabularies of models that are merged: reading them, giving them common token ids, writing the tokenizer.

    read_vocabulary(directory)  -> Vocabulary         tokens and ids, from whatever tokenizer files there are
    merge_vocabularies(models)  -> MergedVocabulary   ids of the output, and which rows each model's matrices give
    tokenizer_files(merged)     -> {name: bytes}      the files that lie beside the merged model

The rules (which rows, which ids) are those of mergekit's ``tokenizer:``; the formats are Hugging Face's. No tokenizer
is run, so none of its libraries is needed.
"""
