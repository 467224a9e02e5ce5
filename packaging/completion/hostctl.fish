# fish completion for hostctl(1)

set -l commands status list show layers holders release sweep hold devices pr-helper monitor metrics doctor

function __hostctl_vms
    hostctl list --names 2>/dev/null
end

complete -c hostctl -f
complete -c hostctl -s h -l help -d 'Say how it is used'
complete -c hostctl -l json -d 'Print JSON'
complete -c hostctl -l bus -x -d 'The bus'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -l version -d 'Print the version'

complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a status -d 'Tell whether this node is clean'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a list -d 'List the VMs of this node'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a show -d 'Show all that is known of a VM'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a layers -d 'List layers'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a holders -d 'Tell why layers are still mounted'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a release -d 'Unmount the layers of VMs that ended'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a sweep -d 'Look at everything now'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a hold -d 'Keep layers from being cleaned up'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a devices -d 'List host devices'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a pr-helper -d 'Tell how it is with qemu-pr-helper'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a monitor -d 'Follow events'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a metrics -d 'Print metrics'
complete -c hostctl -n "not __fish_seen_subcommand_from $commands" -a doctor -d 'Check this node'

complete -c hostctl -n '__fish_seen_subcommand_from show layers holders release hold' -a '(__hostctl_vms)'
complete -c hostctl -n '__fish_seen_subcommand_from status' -l short -d 'One line'
complete -c hostctl -n '__fish_seen_subcommand_from list' -l names -d 'Only names'
complete -c hostctl -n '__fish_seen_subcommand_from list' -l state -x -a 'pending running exited held cleaning blocked released'
complete -c hostctl -n '__fish_seen_subcommand_from list' -s n -l namespace -x -d 'Of this namespace'
complete -c hostctl -n '__fish_seen_subcommand_from layers' -l state -x -a 'mounted busy hung detached gone'
complete -c hostctl -n '__fish_seen_subcommand_from layers' -l kind -x -a 'containerdisk kernel-boot hotplug-file hotplug-directory hotplug-block'
complete -c hostctl -n '__fish_seen_subcommand_from layers' -l paths -d 'Show targets'
complete -c hostctl -n '__fish_seen_subcommand_from release' -l all -d 'All that ended'
complete -c hostctl -n '__fish_seen_subcommand_from release' -l lazy -d 'Detach what is busy'
complete -c hostctl -n '__fish_seen_subcommand_from release sweep' -l dry-run -d 'Only say'
complete -c hostctl -n '__fish_seen_subcommand_from release sweep' -s y -l yes -d 'Do not ask'
complete -c hostctl -n '__fish_seen_subcommand_from hold' -l all -d 'All VMs'
complete -c hostctl -n '__fish_seen_subcommand_from hold' -l why -x -d 'The reason'
complete -c hostctl -n '__fish_seen_subcommand_from hold' -l keep -d 'Until --end'
complete -c hostctl -n '__fish_seen_subcommand_from hold' -l end -d 'Clean again'
complete -c hostctl -n '__fish_seen_subcommand_from devices' -a 'claim release'
complete -c hostctl -n '__fish_seen_subcommand_from devices' -l kind -x -a 'pci mdev usb'
complete -c hostctl -n '__fish_seen_subcommand_from devices' -l claimed -d 'Claimed ones'
complete -c hostctl -n '__fish_seen_subcommand_from devices' -l vmi-uid -x -d "The VMI's UID"
complete -c hostctl -n '__fish_seen_subcommand_from pr-helper' -a 'status enable disable restart probe'
complete -c hostctl -n '__fish_seen_subcommand_from doctor' -l config -r -F -d 'The configuration'
