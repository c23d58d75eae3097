"""The values everybody speaks: errors, units, Plan, Job, Ledger."""
