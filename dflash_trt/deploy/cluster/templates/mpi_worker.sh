set -eu
mkdir -p /run/sshd
ssh-keygen -A
exec /usr/sbin/sshd -D -o StrictModes=no -o PasswordAuthentication=no
