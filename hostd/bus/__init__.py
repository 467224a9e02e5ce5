"""hostd on D-Bus: the adapter over the library, the interfaces, access. No decision is made here.

How `app` uses it::

    from hostd.bus.server import BusServer, NameTaken, State

    server = BusServer(service, devices=None, helper=None)
    task = asyncio.create_task(server.run())     # keeps the connection until cancelled or `server.stop()`
    await server.ready.wait()                    # name owned; READY=1 does not have to wait for it
    server.on_state = lambda state: ...          # State.CONNECTING | READY | LOST, for the status line

`await server.settled()` waits for the outcome of the first attempt instead; `server.connected` says how it is now.
`run()` raises `NameTaken` when somebody else owns the name at the first connect (exit, touch nothing); every other
trouble with the bus is logged and tried again for ever, 0.1 s to 5 s apart. `stop()` sends what is queued and ends
`run()`. `refresh()` tells subscribers when `service.mode` or `service.health` changed outside an event.
`BusServer(address=...)` names another bus than `DBUS_SYSTEM_BUS_ADDRESS` or the system's own.

Layers, from the socket up::

    marshal         values to bytes
    library         which D-Bus library, and what of it is used: login, and bytes to messages
    stream          frames in, frames out, bounded; descriptors
    connection      calls out, messages in, over one stream
    contract        dbus/io.kubevirt.hostd1.xml, read; introspection is made from it
    interface       binds a class's methods and properties to the contract
    object_tree     which object has which interfaces
    dispatch        a call to a reply: standard interfaces, access, errors
    access, polkit  who may call what
    long_answer     what grows with the node, in slices
    manager, vm_object, helper_object, log_control      the interfaces themselves
    signals         the core's events as signals
    server          the life of the connection
"""
