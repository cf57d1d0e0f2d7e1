"""The work of the commands that are more than a call: a file each, from the arguments to what is printed."""
