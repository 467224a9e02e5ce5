"""hostctl: hostd for people, over `hostd.client`.

    main        the program: errors in words, exit codes
    parser      the command line; each module of a command adds its own part
    names       which VM is meant
    screen      tables that fit, colour, JSON
    words       states, times and holders for people
    verdict     is this node clean?
    status, vms, layers, holders, release, sweep, hold, devices, helper, monitor, metrics, doctor    the commands
    checks      what doctor looks at

A command is a module with `add(commands)`, which declares it, and a coroutine that gets a `Session` and the options and
gives the exit code. What it shows is made by functions of plain data.
"""
