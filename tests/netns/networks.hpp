// Hosts on this machine: network name spaces without names, joined by a bridge in a further one. Each host has the
// interface eth0 with the address of host_address(); what leaves it is limited to a rate if one is given. They need root
// (CAP_SYS_ADMIN and CAP_NET_ADMIN). They go with the last process that is in them or holds them open, whatever happens to
// the one that made them: there is nothing to clean up.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tsr::testing {

inline std::string host_address(int host) { return "10.213.77." + std::to_string(host + 1); }

class Networks {
   public:
    // Why there can be none; empty if there can.
    [[nodiscard]] static std::string obstacle() {
        if (std::system("command -v ip >/dev/null && command -v tc >/dev/null") != 0) {
            return "`ip` and `tc` (iproute2) are not installed";
        }
        // In a child: whoever entered a name space by unshare() is in it.
        const int status = std::system("unshare --net ip link add type veth 2>/dev/null");
        return status == 0 ? "" : "this user may not make network name spaces (root may)";
    }

    // `rate` as tc takes it, "1gbit"; empty: no limit.
    explicit Networks(int hosts, const std::string& rate = {}) : home_(open_own()) {
        hub_ = make();
        enter(hub_);
        run("ip link add br0 type bridge && ip link set br0 up");
        for (int host = 0; host < hosts; ++host) {
            hosts_.push_back(make());
            enter(hub_);
            std::ostringstream link;
            link << "ip link add p" << host << " type veth peer name eth0 netns /proc/" << ::getpid() << "/fd/"
                 << hosts_.back() << " && ip link set p" << host << " master br0 up";
            run(link.str());
            enter(hosts_.back());
            std::ostringstream address;
            address << "ip link set lo up && ip addr add " << host_address(host)
                    << "/24 dev eth0 && ip link set eth0 up";
            run(address.str());
            if (!rate.empty()) run("tc qdisc add dev eth0 root tbf rate " + rate + " burst 256kb latency 50ms");
        }
        enter(home_);
    }
    ~Networks() {
        for (const int fd : hosts_) ::close(fd);
        ::close(hub_);
        ::close(home_);
    }
    Networks(const Networks&) = delete;
    Networks& operator=(const Networks&) = delete;

    // The calling thread is on that host from here on.
    void enter_host(int host) const { enter(hosts_.at(static_cast<size_t>(host))); }
    // Nothing goes to or from the host any more, and nobody is told.
    void cut(int host) const {
        enter(hub_);
        run("ip link set p" + std::to_string(host) + " nomaster");
        enter(home_);
    }
    void mend(int host) const {
        enter(hub_);
        run("ip link set p" + std::to_string(host) + " master br0");
        enter(home_);
    }

   private:
    static int open_own() {
        const int fd = ::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            throw std::runtime_error(std::string("cannot open the network name space: ") + std::strerror(errno));
        return fd;
    }
    static void enter(int fd) {
        if (::setns(fd, CLONE_NEWNET) != 0) {
            throw std::runtime_error(std::string("cannot enter a network name space: ") + std::strerror(errno));
        }
    }
    // Enters it.
    static int make() {
        if (::unshare(CLONE_NEWNET) != 0) {
            throw std::runtime_error(std::string("cannot make a network name space: ") + std::strerror(errno));
        }
        return open_own();
    }
    static void run(const std::string& command) {
        if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
    }

    int home_;
    int hub_ = -1;
    std::vector<int> hosts_;
};

}  // namespace tsr::testing
