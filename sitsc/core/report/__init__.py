"""What a report shows of a plan, as plain data: rates, places in memory, steps in order."""
