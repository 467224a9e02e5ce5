# fish completion for hostctl(1)

# The words before the cursor that are neither options nor their values; none behind --.
function __hostctl_words
    set -l value no
    for token in (commandline -opc)[2..]
        if test $value = yes
            set value no
        else if test "$token" = --
            echo --
            return
        else if contains -- $token --bus --state -n --namespace --kind --why --vmi-uid --config
            set value yes
        else if not string match -q -- '-*' $token
            echo $token
        end
    end
end

# Whether the words are these and no more.
function __hostctl_after
    test "$(__hostctl_words)" = "$(string join \n -- $argv)"
end

# Whether the words begin with these.
function __hostctl_in
    set -l words (__hostctl_words)
    test "$words[1..$(count $argv)]" = "$argv"; and not contains -- -- $words
end

function __hostctl_vms
    hostctl list --names 2>/dev/null
end

function __hostctl_layers
    hostctl layers (__hostctl_words)[2] --json 2>/dev/null | grep -o '"volume": "[^"]*"' | cut -d'"' -f4
end

complete -c hostctl -f
complete -c hostctl -n 'not contains -- -- (__hostctl_words)' -s h -l help -d 'Say how it is used'
complete -c hostctl -n 'not contains -- -- (__hostctl_words)' -l json -d 'Print JSON'
complete -c hostctl -n 'not contains -- -- (__hostctl_words)' -l bus -x -d 'The bus'
complete -c hostctl -n __hostctl_after -l version -d 'Print the version'

complete -c hostctl -n __hostctl_after -a status -d 'Tell whether this node is clean'
complete -c hostctl -n __hostctl_after -a list -d 'List the VMs of this node'
complete -c hostctl -n __hostctl_after -a show -d 'Show all that is known of a VM'
complete -c hostctl -n __hostctl_after -a layers -d 'List layers'
complete -c hostctl -n __hostctl_after -a holders -d 'Tell why layers are still mounted'
complete -c hostctl -n __hostctl_after -a release -d 'Unmount the layers of VMs that ended'
complete -c hostctl -n __hostctl_after -a sweep -d 'Look at everything now'
complete -c hostctl -n __hostctl_after -a hold -d 'Keep layers from being cleaned up'
complete -c hostctl -n __hostctl_after -a devices -d 'List host devices'
complete -c hostctl -n __hostctl_after -a pr-helper -d 'Tell how it is with qemu-pr-helper'
complete -c hostctl -n __hostctl_after -a monitor -d 'Follow events'
complete -c hostctl -n __hostctl_after -a metrics -d 'Print metrics'
complete -c hostctl -n __hostctl_after -a doctor -d 'Check this node'

for command in show layers holders hold
    complete -c hostctl -n "__hostctl_after $command" -a '(__hostctl_vms)'
end
complete -c hostctl -n '__hostctl_in holders; and test (count (__hostctl_words)) = 2' -a '(__hostctl_layers)'
complete -c hostctl -n '__hostctl_in release' -a '(__hostctl_vms)'
complete -c hostctl -n '__hostctl_in status' -l short -d 'One line'
complete -c hostctl -n '__hostctl_in list' -l names -d 'Only names'
complete -c hostctl -n '__hostctl_in list' -l state -x -a 'pending running exited held cleaning blocked released'
complete -c hostctl -n '__hostctl_in list' -s n -l namespace -x -d 'Of this namespace'
complete -c hostctl -n '__hostctl_in layers' -l state -x -a 'mounted busy hung detached gone'
complete -c hostctl -n '__hostctl_in layers' -l kind -x -a 'containerdisk kernel-boot hotplug-file hotplug-directory hotplug-block'
complete -c hostctl -n '__hostctl_in layers' -l paths -d 'Show targets'
complete -c hostctl -n '__hostctl_in release' -l all -d 'All that ended'
complete -c hostctl -n '__hostctl_in release' -l lazy -d 'Detach what is busy'
for command in release sweep
    complete -c hostctl -n "__hostctl_in $command" -l dry-run -d 'Only say'
    complete -c hostctl -n "__hostctl_in $command" -s y -l yes -d 'Do not ask'
end
complete -c hostctl -n '__hostctl_in hold' -l all -d 'All VMs'
complete -c hostctl -n '__hostctl_in hold' -l why -x -d 'The reason'
complete -c hostctl -n '__hostctl_in hold' -l keep -d 'Until --end'
complete -c hostctl -n '__hostctl_in hold' -l end -d 'Clean again'
complete -c hostctl -n '__hostctl_after devices' -a 'claim release'
complete -c hostctl -n '__hostctl_after devices' -l kind -x -a 'pci mdev usb'
complete -c hostctl -n '__hostctl_after devices' -l claimed -d 'Claimed ones'
complete -c hostctl -n '__hostctl_in devices claim' -l vmi-uid -x -d "The VMI's UID"
for command in claim release
    complete -c hostctl -n "__hostctl_in devices $command; and test (count (__hostctl_words)) = 3" -a "(__hostctl_vms | grep /)"
end
complete -c hostctl -n '__hostctl_after pr-helper' -a 'status enable disable restart probe'
complete -c hostctl -n '__hostctl_in doctor' -l config -r -F -d 'The configuration'
