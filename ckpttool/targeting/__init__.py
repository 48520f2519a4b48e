"""How an opened checkpoint becomes a target: mesh, names, tensors, files and the plan that writes them."""
