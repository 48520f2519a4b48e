"""Paddle's merge of a flex checkpoint. Runs in an environment with paddlepaddle.

python bench/peers/paddle_merge.py SRC DST
"""

import sys

from paddle.distributed.flex_checkpoint.dcp.load_state_dict import merge_sharded_state_dict

merge_sharded_state_dict(sys.argv[1], sys.argv[2])
