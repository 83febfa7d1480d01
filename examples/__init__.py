"""What a user of this project writes: a task with its own data, reward and environment, and one small file for every kind of plug."""
