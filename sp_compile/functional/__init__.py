"""The operators by hand: attention, scans and exchanges on the shards of a model that is distributed already."""
