#include "ulysses/base/text.h"

namespace ulysses::base {

void append(std::string& text, std::string_view part) { text.append(part); }

}  // namespace ulysses::base
