"""What users give: files, sizes, times.  Read strictly; an error says where it is, what was found and expected."""
