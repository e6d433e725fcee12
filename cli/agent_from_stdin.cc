// `tessera agent-from-stdin`: what ssh starts on another host. It reads an order (launch/hosts/ssh.hpp), runs the command
// that the order names, and passes on the signals that follow (launch/front.hpp).
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "commands.hpp"
#include "launch/front.hpp"
#include "launch/hosts/ssh.hpp"

namespace tsr::cli {

namespace {

// Reads exactly `size` bytes: what follows are signals.
std::string read_exactly(size_t size) {
    std::string text(size, '\0');
    for (size_t done = 0; done < size;) {
        const ssize_t got = ::read(STDIN_FILENO, text.data() + done, size - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw os_error("cannot read the order for an agent", errno);
        if (got == 0) throw Error(Code::corrupt, "the order for an agent is cut short");
        done += static_cast<size_t>(got);
    }
    return text;
}

std::string read_line() {
    constexpr size_t longest = 64;
    std::string line;
    while (line.size() < longest) {
        const std::string byte = read_exactly(1);
        if (byte == "\n") break;
        line += byte;
    }
    return line;
}

int run_order() {
    const AgentOrder order = decode_order(read_exactly(order_length(read_line())));
    for (const auto& [name, value] : order.environment) {
        if (::setenv(name.c_str(), value.c_str(), 1) != 0) throw os_error("cannot set the variable " + name, errno);
    }
    if (::chdir(order.directory.c_str()) != 0) {
        throw os_error(fmt::format("this host cannot enter the job's directory {}", order.directory), errno);
    }
    std::vector<std::string> words{"tessera"};
    words.insert(words.end(), order.arguments.begin(), order.arguments.end());
    return run_behind_front(words);
}

}  // namespace

void add_agent_from_stdin(Command& tessera) {
    Command command = tessera.add_command("agent-from-stdin", "Run what an order on standard input names");
    command.hide();
    command.on_run([] { return run_order(); });
}

}  // namespace tsr::cli
