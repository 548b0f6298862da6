"""One file a panel: `.root` is what Panel shows, `.update(…)` takes what the record says; none knows a job or pool."""
