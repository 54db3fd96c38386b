"""Scheduled work and bulk dispatch. Filled by the jobs issue; nothing here yet."""
