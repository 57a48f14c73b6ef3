"""What an episode is for decides which tasks it draws."""

TRAINING_PURPOSES = (  # of episodes that draw training tasks; others draw held-out ones
    "training", "warm-up", "cloning", "tuning", "fresh tuning",
)  # fmt: skip
VALIDATION = "validation"  # the purpose of held-out rounds of training, and the split of their tasks
