"""The most that a config may ask for, far over any published model: what it says is looped over and allocated."""

MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 512, 4096, 4096
MOST_CHANNELS, MOST_VOCAB, MOST_POSITIONS = 1 << 20, 1 << 24, 1 << 27
MOST_EXPERTS = 4096
MOST_FACTOR = 1e6  # of rotary frequencies
MOST_THETA = 1e15
