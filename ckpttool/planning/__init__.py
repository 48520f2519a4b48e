"""From views of tensors to the steps that write them."""
