"""How a model family's logical tensors are partitioned over a mesh: rules as data, one function as their meaning.

names.py      patterns with captures ({layer}, {expert}) and the cache that makes 100,000 names cheap
rules.py      the verbs (column, row, vocab, replicate, fused, grouped) and local_boxes(), which gives them meaning
files.py      families/*.yaml: which there are, and what stands in the one that is wanted
spec.py       what may stand in one
statements.py the statements of namings
family.py     which rule each tensor has, under which naming
nearest.py    which family is nearest to a model that none is for
sizes.py      the sizes of a model, and what else the words of a family file mean for a config
expressions.py what a family file may compute of them
scales.py     which tensor is the scale grid of which weight, and its block
packed.py     the same for integers that share a word: GPTQ, AWQ, compressed-tensors
classes.py    what the name of a model's class says of its head
shapes.py     the tensors that a family has for a config, without any file
shards.py     runs of elements of a sharded optimizer -> boxes
components.py all that a checkpoint stores -> its catalog: each component assembled by itself
assemble.py   stored tensors of ranks -> logical tensors
partition.py  logical tensors -> stored tensors of ranks; the inverse, through the same local_boxes()
"""
