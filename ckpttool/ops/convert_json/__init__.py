"""``ckpttool convert-json``: Paddle programs and their parameters, and the JSON of safetensors files."""
