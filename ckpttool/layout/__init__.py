"""How a model family's logical tensors are partitioned over a mesh: rules as data, one function as their meaning.

names.py      patterns with captures ({layer}, {expert}) and the cache that makes 100,000 names cheap
rules.py      the verbs (column, row, vocab, replicate, fused, grouped) and local_boxes(), which gives them meaning
family.py     families/*.yaml: which rule each tensor has, which config field each size is, how namings relate
scales.py     which tensor is the scale grid of which weight, and its block
packed.py     the same for integers that share a word: GPTQ, AWQ, compressed-tensors
shapes.py     the tensors that a family has for a config, without any file
shards.py     runs of elements of a sharded optimizer -> boxes
components.py all that a checkpoint stores -> its catalog: each component assembled by itself
assemble.py   stored tensors of ranks -> logical tensors
partition.py  logical tensors -> stored tensors of ranks; the inverse, through the same local_boxes()
"""
