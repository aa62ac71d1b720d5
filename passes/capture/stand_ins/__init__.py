"""Define what Dynamo traces in place of kernel functions of packages."""
