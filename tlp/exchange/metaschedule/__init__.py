"""MetaSchedule databases: `records` reads them, `importing` stores what they hold, `exporting` writes one."""
