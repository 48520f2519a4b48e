"""Checkpoints of Megatron-LM, Megatron Core and NeMo.

names.py     canonical names of tensors, and how they are spelled in files
models.py    what Megatron's arguments say of each kind of model
args.py      these arguments and config.json, one made from the other
fields.py    values of both, of which nothing is believed
rotary.py    rotary positions in both
sizes.py     whether a configuration fits the tensors
order.py     the order of a model's parameters in memory
buffers.py   where parameters lie in the flat buffers of the distributed optimizer
stages.py    which stage and which of its chunks holds a tensor
groups.py    groups of parameters in its optimizers, and counters
common_state.py  the same, and arguments, of what is written
run.py       which save of a run is meant
legacy*.py   a directory for each rank (mp_rank_00): which ranks these are, their tensors, their optimizer;
             *_write.py write them
dist*.py     dist_checkpointing (torch_dist): where a save is, its keys, the optimizer's state
nemo*.py     where both lie in saves of NeMo and Megatron Bridge, and what says the model's sizes there
"""

from ckpttool.formats.megatron.dist import MegatronDist
from ckpttool.formats.megatron.legacy import Megatron

__all__ = ["Megatron", "MegatronDist"]
