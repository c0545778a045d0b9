const nothing = 0;
