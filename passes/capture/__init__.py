"""Dynamo's graph or an exported program becomes the one IR: functional pre-dispatch ATen with global shapes."""
