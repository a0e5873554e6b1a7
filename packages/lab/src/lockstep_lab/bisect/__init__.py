"""Why did the numbers change? Trains two runs again, and names the first step and stage that differ."""
