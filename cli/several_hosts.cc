#include "several_hosts.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/env.hpp"
#include "base/refuse.hpp"
#include "comm/host.hpp"
#include "launch/environment.hpp"
#include "launch/front.hpp"
#include "launch/process.hpp"
#include "store/token.hpp"

namespace tsr::cli {

namespace {

// What else the agents of a job have in common: where programs are found, and the settings of torchrun and of Tessera that
// hold for all ranks.
bool is_for_agents(std::string_view name) {
    constexpr std::array<std::string_view, 13> names{"PATH",
                                                     "LD_LIBRARY_PATH",
                                                     "VIRTUAL_ENV",
                                                     "TESSERA_BACKEND",
                                                     "TESSERA_HEARTBEAT_TIMEOUT_MS",
                                                     "TESSERA_INSECURE",
                                                     "TESSERA_LIBRARY",
                                                     "TESSERA_LOG",
                                                     "TESSERA_TIMEOUT_MS",
                                                     "TESSERA_TLS",
                                                     "TESSERA_TLS_CA",
                                                     "TESSERA_TLS_CERT",
                                                     "TESSERA_TLS_KEY"};
    return is_exported(name) || name.starts_with("PET_") || std::ranges::find(names, name) != names.end();
}

Assignments exported() {
    Assignments all;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text(*entry);
        const size_t equals = text.find('=');
        if (equals == std::string_view::npos || !is_for_agents(text.substr(0, equals))) continue;
        all.emplace_back(text.substr(0, equals), text.substr(equals + 1));
    }
    return all;
}

Token token_of_job() {
    const bool is_given = env_text("TESSERA_TOKEN") || env_text("TESSERA_TOKEN_FILE");
    return is_given ? find_token("", false, "the job's hosts") : Token::random();
}

bool is_here(const std::string& host) { return host == "localhost" || host == host_name(); }

}  // namespace

int run_on_hosts(const SeveralHosts& job) {
    const std::vector<PlannedHost>& hosts = job.plan.hosts;
    const std::string& address = job.master_address.empty() ? hosts.front().host : job.master_address;
    if (job.master_address.empty() && address == "localhost") {
        refuse(
            "the job's first host is localhost, by which the others mean themselves; give --master-addr this host's "
            "name or address, as the other hosts know it");
    }
    const std::string id = Token::random().hex().substr(0, 16);
    const int port = job.master_port != 0 ? job.master_port : port_from(id);
    const std::string endpoint = address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                                        : fmt::format("[{}]:{}", address, port);
    const std::string tessera = std::filesystem::read_symlink("/proc/self/exe").string();
    Assignments environment = exported();
    if (!job.insecure) environment.emplace_back("TESSERA_TOKEN", token_of_job().hex());
    Front front;
    front.stop_signals = job.stop_signals;
    front.patience = job.patience;
    for (size_t k = 0; k < hosts.size(); ++k) {
        AgentOrder order;
        order.directory = std::filesystem::current_path().string();
        order.environment = environment;
        if (job.environment) {
            for (auto& variable : job.environment(k)) order.environment.push_back(std::move(variable));
        }
        if (!hosts[k].devices.empty()) {
            order.environment.emplace_back("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(hosts[k].devices, ",")));
        }
        order.arguments = {"run",
                           "--nnodes",
                           std::to_string(hosts.size()),
                           "--node-rank",
                           std::to_string(k),
                           "--rdzv-endpoint",
                           endpoint,
                           "--rdzv-id",
                           id,
                           "-n",
                           std::to_string(hosts[k].ranks.size())};
        order.arguments.insert(order.arguments.end(), job.options.begin(), job.options.end());
        order.arguments.insert(order.arguments.end(), job.program.begin(), job.program.end());
        SshStart start = ssh_start(hosts[k].host, job.ssh_port, tessera, order);
        if (is_here(hosts[k].host)) start.command = {tessera, "agent-from-stdin"};
        front.starts.push_back({hosts[k].host, std::move(start)});
    }
    return run_guarded(
        [&](int guardian, const sigset_t& signal_mask) { return run_front(front, guardian, signal_mask); },
        job.stop_signals);
}

}  // namespace tsr::cli
