"""Running a target with a draft for people: generation in the terminal."""
