// Runs a function in one forked process a rank, over a fresh directory for the rendezvous. Returns 0 if all did.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace bench {

inline int fork_ranks(int ranks, const std::function<int(int rank, const std::string& directory)>& body) {
    std::string directory = (std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX").string();
    if (mkdtemp(directory.data()) == nullptr) return 1;
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
        const pid_t pid = fork();
        if (pid == 0) _exit(body(rank, directory));
        children.push_back(pid);
    }
    int failed = 0;
    for (const pid_t pid : children) {
        int status = 0;
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = 1;
    }
    std::filesystem::remove_all(directory);
    return failed;
}

}  // namespace bench
