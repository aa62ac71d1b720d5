"""Capture Dynamo graphs and exported programs as IR: functional pre-dispatch ATen with global shapes."""
