"""Where vectors and their values are kept, in memory and on the disk, and how the nearest are found."""
