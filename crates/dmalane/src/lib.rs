//! Moves bytes from files to devices along one path: allocate, read, map, transfer, bind
