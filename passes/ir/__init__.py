"""The intermediate representation: meshes, layouts, graphs and their facts, collectives, and the text form."""
