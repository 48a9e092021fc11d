"""The schedules that come with Atoll."""
