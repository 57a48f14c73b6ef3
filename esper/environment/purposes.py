"""What an episode is for decides which tasks it draws."""

TRAINING_PURPOSES = (  # of episodes that draw training tasks; others draw held-out ones
    "training", "warm-up", "cloning", "tuning", "fresh tuning",
)  # fmt: skip
