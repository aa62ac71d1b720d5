"""Where people train: `sp_compile.integrations.transformers` and `.accelerate`.

Each imports the package that it is for; this module imports none.
"""
