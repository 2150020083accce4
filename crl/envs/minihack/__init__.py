"""What the MiniHack environments share. `level` is NetHack itself: it alone, and `game`, import nle and minihack."""
