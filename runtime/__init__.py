"""Where engines run: loading and checking, memory, sessions, schedules, sampling, text. Knows no compiler."""
