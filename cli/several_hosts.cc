#include "several_hosts.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/env.hpp"
#include "base/random_id.hpp"
#include "base/refuse.hpp"
#include "comm/host.hpp"
#include "launch/environment.hpp"
#include "launch/front.hpp"
#include "launch/process.hpp"
#include "launch/variables.hpp"
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

const std::string& address_of(const SeveralHosts& job) {
    return job.master_address.empty() ? job.plan.hosts.front().host : job.master_address;
}

// The command line of a host's agent.
std::vector<std::string> words_of(const SeveralHosts& job, size_t node, int port, const std::string& id) {
    const std::string& host = address_of(job);
    const std::string endpoint =
        host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
    std::vector<std::string> words{"run",         "--nnodes",           std::to_string(job.plan.hosts.size()),
                                   "--node-rank", std::to_string(node), "--rdzv-endpoint",
                                   endpoint,      "--rdzv-id",          id};
    if (!job.is_placed) words.insert(words.end(), {"-n", std::to_string(job.plan.hosts[node].ranks.size())});
    words.insert(words.end(), job.options.begin(), job.options.end());
    words.insert(words.end(), job.program.begin(), job.program.end());
    return words;
}

// The variables of a host's agent besides those that all of them get.
Assignments variables_of(const SeveralHosts& job, size_t node) {
    Assignments variables = job.environment ? job.environment(node) : Assignments{};
    const std::vector<std::string>& devices = job.plan.hosts[node].devices;
    if (!devices.empty()) variables.emplace_back("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(devices, ",")));
    return variables;
}

// An agent here for each of two names would be two hosts of the job on one machine.
void require_different_hosts(const std::vector<PlannedHost>& hosts) {
    const PlannedHost* first = nullptr;
    for (const PlannedHost& host : hosts) {
        if (!is_this_host(host.host)) continue;
        if (first != nullptr) refuse("hosts '{}' and '{}' are both this host; name it once", first->host, host.host);
        first = &host;
    }
}

}  // namespace

bool is_this_host(const std::string& name) { return name == "localhost" || name == host_name(); }

int run_on_hosts(const SeveralHosts& job) {
    const std::vector<PlannedHost>& hosts = job.plan.hosts;
    require_different_hosts(hosts);
    if (job.master_address.empty() && hosts.front().host == "localhost") {
        refuse(
            "the job's first host is localhost, by which the others mean themselves; give --master-addr this host's "
            "name or address, as the other hosts know it");
    }
    const std::string id = random_id();
    const int port = job.master_port != 0 ? job.master_port : port_from(id);
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
        for (auto& variable : variables_of(job, k)) order.environment.push_back(std::move(variable));
        order.arguments = words_of(job, k, port, id);
        SshStart start = ssh_start(hosts[k].host, job.ssh_port, tessera, order);
        if (is_this_host(hosts[k].host)) start.command = {tessera, "agent-from-stdin"};
        front.starts.push_back({hosts[k].host, std::move(start)});
    }
    return run_guarded(
        [&](int guardian, const sigset_t& signal_mask) { return run_front(front, guardian, signal_mask); },
        job.stop_signals);
}

void become_agent(const SeveralHosts& job, size_t node) {
    Variables variables;
    for (auto& [name, value] : variables_of(job, node)) variables.set(name, std::move(value));
    std::vector<std::string> words = words_of(job, node, job.master_port, "none");
    words.insert(words.begin(), "tessera");
    execute("/proc/self/exe", words, variables.entries());
}

}  // namespace tsr::cli
