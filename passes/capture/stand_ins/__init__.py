"""Define what Dynamo traces in place of kernel functions of packages, and of methods of models."""
