"""The verbs of `%dtrain` and `dtrain`: one table for both, so that they cannot drift.

A verb is a function `(context, arguments) -> outcome`. It gets its screen, clock and pool from the context and knows
neither IPython nor a terminal; `workbench.magics` and `workbench.cli` make the contexts and show the outcomes.
"""
