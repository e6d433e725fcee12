// The options of a job of several hosts, from the words of torchrun's command line or from Slurm's variables.
#pragma once

#include <optional>
#include <string>

#include "launch/job.hpp"

namespace tsr {

// As given on the command line; empty: not given.
struct HostWords {
    std::string nodes = "1";  // N or MIN:MAX
    std::string endpoint;     // HOST[:PORT], [IPv6]:PORT
    std::string store_hosts;  // HOST[:PORT],...
    std::string backend;
    std::string run_id;
    std::string conf;  // KEY=VALUE,...
    std::optional<std::string> node_rank;
    std::string master_address;  // the static form of the endpoint
    std::string master_port;
    bool standalone = false;
};

// nullopt: the job runs on this host alone. Throws INVALID_ARGUMENT naming the option.
[[nodiscard]] std::optional<HostOptions> hosts_of(const HostWords& words);

}  // namespace tsr
