"""Lag, control policy, dashboard, doctor. Filled by the control issue; nothing here yet."""
