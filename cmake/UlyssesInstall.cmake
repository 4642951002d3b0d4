# cmake --install: libraries, headers and the package that find_package(ulysses) reads.
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ulysses")

install(DIRECTORY src/ulysses DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS ulysses_core EXPORT ulyssesCoreTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT ulyssesCoreTargets NAMESPACE ulysses:: DESTINATION "${package_dir}")
if(ULYSSES_TORCH)
  install(TARGETS ulysses EXPORT ulyssesTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT ulyssesTargets NAMESPACE ulysses:: DESTINATION "${package_dir}")
endif()
if(TARGET ulysses-check)
  install(TARGETS ulysses-check RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/ulyssesConfig.cmake.in "${PROJECT_BINARY_DIR}/ulyssesConfig.cmake"
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ulyssesConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/ulyssesConfig.cmake" "${PROJECT_BINARY_DIR}/ulyssesConfigVersion.cmake"
              cmake/UlyssesTorch.cmake DESTINATION "${package_dir}")
